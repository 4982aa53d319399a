"""Test the paper's claims on verified records, by rules fixed beforehand."""
