"""The policy worker: optimizer steps, reference policy and training state."""
