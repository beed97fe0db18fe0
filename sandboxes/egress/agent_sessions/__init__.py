"""Sessions of agents on other machines: join, upgraded connections, and the listener for the control plane's processes."""
