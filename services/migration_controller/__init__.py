"""Decides which segments move between tiers: takes reports in, sends commands out, touches no bytes."""
