"""The well's sockets: who may connect, what each connection says, and what an operator may ask."""
