"""ckpttool.rules"""
