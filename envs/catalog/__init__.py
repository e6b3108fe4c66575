"""Ready-made environments: one file each, registered by name, imported when they are made."""
