"""Where zf_cute meets other libraries.  Each module imports its library only when called."""
