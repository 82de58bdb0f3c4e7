"""Images for vision-language models: pixels, and the text that stands for an image."""
