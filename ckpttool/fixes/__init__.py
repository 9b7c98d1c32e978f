"""ckpttool.fixes"""
