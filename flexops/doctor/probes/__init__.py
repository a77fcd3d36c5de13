"""Looking at the machine. Each probe returns one fact of ``doctor.facts`` or raises;
``doctor.examination`` guards them all. No judgement here."""
