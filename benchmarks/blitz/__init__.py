"""BlitzScale's evaluation (OSDI 2025) on simulated clusters: what is compared (`cases`, `systems`), traffic (`traffic`), rows."""
