"""Device code: what runs inside a kernel.  Nothing here imports torch."""
