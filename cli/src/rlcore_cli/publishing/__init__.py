"""Publishes a trained model: the model card and the upload to the Hugging Face Hub."""
