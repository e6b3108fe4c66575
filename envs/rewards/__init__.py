"""Rewards: weighted functions of an episode, and ready-made ones."""
