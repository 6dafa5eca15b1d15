"""Tests of the module, the data module, the callbacks and the command that users touch."""
