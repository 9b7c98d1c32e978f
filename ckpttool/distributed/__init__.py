"""ckpttool.distributed"""
