"""When which blocks are brought up before anybody has asked for them."""
