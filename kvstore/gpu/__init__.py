"""The memory of devices in the daemon: carries out what core/ decides of it, by workers of its own."""
