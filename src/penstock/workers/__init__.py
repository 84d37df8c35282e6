"""Workers: processes and threads behind one interface. ``child`` has the code that runs in them."""
