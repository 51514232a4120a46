"""The command line: one thin module a command, found through ``nagnet.cli.registry``."""
