"""Index codings: encodings of the positions of sparse entries; one file per coding."""
