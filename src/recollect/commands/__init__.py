"""The commands: one small file each, with a dataclass that is its flags and their help, and what it does.

No library logic: they load, call the library, and show. Torch is imported only when a command needs it.
"""
