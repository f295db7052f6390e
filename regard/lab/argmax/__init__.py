"""Can attention by argmax learn where to look?"""
