"""The benchmark of test-time adaptation: rivals, corruptions, sweeps, records and studies."""
