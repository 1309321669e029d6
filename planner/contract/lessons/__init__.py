"""What runs taught of a machine: corrections of its profile, intervals, and the simple plan where nothing better is certain."""
