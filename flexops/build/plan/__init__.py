"""Commands, inputs and keys of a build, as values; nothing runs here."""
