"""How rows attend to their pages: views where pages are adjacent, a kernel over page tables where they are not."""
