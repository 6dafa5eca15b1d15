"""What ends a run early: signals, ranks that are gone."""
