"""ckpttool.remapping.sharding"""
