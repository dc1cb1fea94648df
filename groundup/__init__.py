"""The parts of the toolkit, by subject; the stages at the root are made of them."""
