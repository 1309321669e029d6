"""Hidden states on their way from rank to rank: by copies between cards, by torch.distributed, by words inside a recorded step."""
