"""Kills commands at random moments, and takes disks, folders and clocks away from them: `make torture`."""
