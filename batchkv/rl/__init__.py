"""Rollouts for reinforcement learning, on the policy that is being trained."""
