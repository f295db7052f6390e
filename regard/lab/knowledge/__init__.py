"""What does a model know from reading alone?"""
