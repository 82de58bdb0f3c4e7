"""One run: its flags, its plan, its folder, how it stops and goes on."""
