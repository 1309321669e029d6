"""A checkpoint's matrices in another format, as `runtime pack format=` writes them."""
