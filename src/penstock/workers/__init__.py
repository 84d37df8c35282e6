"""Workers: processes and threads behind one interface, and the code that runs in them (``child``)."""
