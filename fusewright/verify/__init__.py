"""Is a candidate right? Its results beside eager's, both against a run in float64."""
