"""Images of the targets: build, run, check. The docker SDK is imported only inside the functions
that talk to an engine; torch never is."""
