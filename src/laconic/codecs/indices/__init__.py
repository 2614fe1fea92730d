"""Index codings: how the positions of sparse entries travel; one file a coding."""
