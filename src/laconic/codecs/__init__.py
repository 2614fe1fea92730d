"""Codecs: one file or package a codec; a flat float32 tensor to bytes and back."""
