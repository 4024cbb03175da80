"""zf-profile: the terminal tool of zf_cute.  Commands import what they need when they run."""
