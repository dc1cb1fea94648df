"""What does every training run share?"""
