"""What others read without this package: models in Hugging Face's format, adapters in peft's."""
