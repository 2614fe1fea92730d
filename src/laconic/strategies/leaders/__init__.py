"""Leaders: ranks are pulled towards a leader or a centre."""
