"""Leaders: ranks are pulled towards a leader or a centre; one file or package per strategy."""
