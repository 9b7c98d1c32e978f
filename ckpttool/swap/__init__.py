"""ckpttool.swap"""
