"""The owner of the model and of running sequences: answers prompts, token by token."""
