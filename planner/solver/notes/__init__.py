"""What a user is told beside a plan: of its experts, its formats, its kept pages."""
