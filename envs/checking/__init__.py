"""What tells an author whether an environment keeps the contract, and what to change."""
