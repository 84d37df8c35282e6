"""Who fetches: process and thread pools behind one interface, and the child's main loop."""
