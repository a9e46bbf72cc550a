"""End-to-end tests: the installed package in a real vLLM, in the processes that vLLM starts by default."""
