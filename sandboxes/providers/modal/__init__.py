"""Modal provider. The client of Modal reads a configuration file when it is imported: here, an empty one."""

import os

os.environ["MODAL_CONFIG_PATH"] = os.devnull
