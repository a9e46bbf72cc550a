"""The well as a process: a thin shell of sockets, threads and signals over the state machine."""
