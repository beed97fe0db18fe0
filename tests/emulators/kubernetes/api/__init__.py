"""API server of the emulator."""
