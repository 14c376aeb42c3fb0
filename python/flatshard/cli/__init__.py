"""The command ``flatshard``: one module a command, each with ``main(arguments) -> exit status``."""
